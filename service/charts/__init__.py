"""The charts of the pages, of the report and of `gemmsmith eval`, as SVG.

`draw` has the parts that all charts share. Every other module draws charts of one kind, and returns
an empty text if there is nothing to draw. Colours are classes of `pages/static/charts.css`, so that
they follow the light and dark schemes. A shape or a text always says the same as the colour.
"""
