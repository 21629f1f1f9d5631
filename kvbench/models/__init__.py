"""Where weights come from and what they say of themselves, before anything is loaded.

In: a model name (alias, config, .gguf file, folder or hub id). Out: its files, config, fingerprint, attention
facts and bytes of weights. Imports no torch and no engine, so that `plan` and `gate` stay fast; `engines`
loads the weights.
"""
