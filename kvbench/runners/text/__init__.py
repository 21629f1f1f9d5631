"""Text through an engine, shared by the quality runners: tokens, prompts, packing, decoding, scoring."""
