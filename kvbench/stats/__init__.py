"""Statistics on plain numbers; imports nothing else of kvbench.

In: numbers and the clusters they belong to. Out: estimates with intervals, p-values, required sample sizes.
scipy and numpy are imported inside the functions that need them, so that importing the package stays cheap.
"""
