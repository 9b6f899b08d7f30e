"""The pages under /ui, and /docs: what the service knows, for people, rendered on the server.

Every page works without a script and without anything from another host. Forms post to /ui and are
answered with a redirect, so that reloading a page repeats nothing. An error under /ui is a page
too; `service.pages.errors` makes it of the problem document that the API would have given.
"""
