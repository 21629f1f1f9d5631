"""The built-in corpus `instructions`: what one asks of a chat model, to be answered in running text. One document each.

A small model soon repeats itself when it continues reference prose; answers to these it writes for some hundred tokens before
it does, which is what leaves room to see a cache that makes it do so sooner.
"""

INSTRUCTIONS = (
    "Tell me a story about a fox and a river.",
    "Explain how rain forms.",
    "Write a letter to a friend about a journey by train.",
    "What is a library, and how does one use it?",
    "Describe the four seasons in a small town by the sea.",
    "How does a bicycle keep its balance? Explain it to a child.",
    "Write a short speech for the opening of a new school.",
    "Compare life on a farm with life in a large city.",
)
