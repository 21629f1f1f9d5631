"""The machine of a run: host facts, the state of the device, CI.

In: the operating system, the driver, environment variables. Out: facts for the manifest and records, and the
identity that enters every task's key. Imports no torch at the top and nothing of engines or runners.
"""
