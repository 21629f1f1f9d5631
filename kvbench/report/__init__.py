"""Reports from stored records: HTML, Markdown, CSV, Parquet, JSON, JUnit, GitHub, console. No torch here."""
