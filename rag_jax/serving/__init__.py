"""A model that answers other programs: one process, HTTP, OpenAI's API and a plain one.

    fields.py     a request's JSON, checked field by field
    indexes.py    the indexes that are open, and what is computed with each
    batching.py   one thread for the devices; what waits is joined into batches
    listening.py  what that thread tells of answers while they grow
    results.py    answers as JSON: cut, cited, in pieces
    page.py       the page at /
    app.py        routes, limits, errors
    sockets.py    where it listens
"""
