"""`covey watch`: a page in the browser that shows runs while they train. Loopback only, and read only.

command      finds the runs, starts the server, ends it at Ctrl-C
server       the routes, whose JSON is described there; the only file of this package that imports Starlette
guard        refuses requests that are not the page's own
answers      the content of each route, from
  library      the watched runs, and how far each has got
  curves, rollouts, search, files
events       server-sent events
report       the page in one file, with the answers inlined: `covey report`
index        an SQLite index of a run's rollouts, written by the process `indexer`
static/      the page
"""
