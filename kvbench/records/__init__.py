"""What a run writes and reads: the typed run, its manifest, one record a task.

The schema and the names of the files are here and nowhere else.
"""
