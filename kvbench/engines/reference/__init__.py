"""The reference engine: transformers models over an own paged KV store.

Importing any module of it silences the Hugging Face libraries first: they read their settings when imported.
"""

from kvbench.models.download import quiet

quiet()
