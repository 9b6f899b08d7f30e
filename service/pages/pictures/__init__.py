"""Pictures of the pages alone, as inline SVG; `service.report.axes` has what all are drawn with.

Colours are classes of `static/pictures.css`, so that they follow a page's light and dark schemes;
state is shown by shape or text too, never by colour alone. All text is escaped. No scripts: a
mark's `<title>` is what a browser shows when it is pointed at.
"""
