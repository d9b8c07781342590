"""`covey watch`: a page in the browser that shows runs while they train. Loopback only, and read only.

server     the routes, whose JSON is described there; the only file of this package that imports Starlette
"""
