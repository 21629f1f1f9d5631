"""How numbers, cells and tables are shown: text, SVG, data frames.

In: values. Out: strings. Decides nothing.
"""
