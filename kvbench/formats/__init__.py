"""What a KV or weight format is.

Out: descriptors, exact byte formulas, scales, and the dialects of checkpoints. No torch here.
"""
