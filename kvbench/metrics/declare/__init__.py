"""What a metric is made of: its unit, its declaration, its value on a record, its change between two runs."""
