"""The charts of the pages, of the report and of `gemmsmith eval`, as SVG.

`draw` has what all are drawn with. Every other module draws charts of one kind, and returns an
empty text where there is nothing to draw. Colours are classes of `pages/static/charts.css`, so that
they follow the light and dark schemes; a shape or a text always says the same as the colour.
"""
