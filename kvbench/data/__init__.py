"""Evaluation data: corpora and multiple-choice questions, found below the data directory, on the hub or built
in.

In: a name and the data directory. Out: texts and questions with the sha256, source and licence of their
content. Data that is not there raises NotAvailable; nothing replaces it. Imports no torch and nothing of
engines or runners.
"""
