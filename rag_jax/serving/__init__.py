"""A model that answers other programs: one process, HTTP, OpenAI's API and a plain one.

    fields.py     a request's JSON, checked field by field
    asking.py     what a request asks for, from its fields
    indexes.py    the open indexes, and what is computed with each
    batching.py   the thread that uses the devices; waiting requests are joined into batches
    listening.py  how that thread passes on the first tokens of an answer
    results.py    answers as JSON: cut, cited, in pieces
    events.py     a stream of server-sent events
    failures.py   the responses to requests that failed
    metrics.py    figures for Prometheus
    page.py       the page at /
    app.py        routes, tokens, time limits
    settings.py   limits and names
    sockets.py    the sockets that the server listens with
    protocol.py   bounds on what a connection sends before a route sees it
"""
