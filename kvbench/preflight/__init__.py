"""What can be known before a run: plan, validate, init, doctor. Loads no weights."""
