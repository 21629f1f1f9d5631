"""The reference engine: transformers models over an own paged KV store."""
