"""One task, from its spec to its record: `checks` (what must hold), `prepare`, `measure`.

In: a `Task` and the shared `Session`. Out: a `Record`. `checks` is pure and imports no torch, so that
`validate` reports by the same rules by which a task is refused. Nothing here reads records of other tasks or
judges a result.
"""
