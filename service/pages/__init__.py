"""The pages under /ui and /docs, rendered on the server.

Every page works without scripts and without files from another host. Forms post to /ui and are
answered with a redirect, so that reloading a page repeats nothing. An error under /ui is a page
too: `service.pages.errors` renders the problem document that the API would have sent.
"""
