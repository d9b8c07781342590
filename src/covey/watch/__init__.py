"""`covey watch`: a page in the browser that shows runs while they train. Loopback only, and read only.

command      finds the runs, starts the server, ends it at Ctrl-C; refuses requests that are not the page's own
server       the routes, whose JSON is described there, and server-sent events; the only file that imports Starlette
answers      the content of each route, from
  library      the watched runs, and how far each has got
  rollouts, files
report       the page in one file, with the answers inlined: `covey report`
index        an SQLite index of a run's rollouts: the process that writes it, and the search
static/      the page
"""
