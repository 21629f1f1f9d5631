"""Reports from stored records: HTML, CSV, JSON, console. No torch here."""
