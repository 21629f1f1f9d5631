"""One task, from its spec to its record: `checks` (pure, no torch), `prepare`, `measure`."""
