"""The report of runs, ``dtrain report``: run directories as one HTML page, and its charts as PNG files.

The files in reading order:

* ``run_logs`` reads the other files of a run: bad samples, hangs, messages, media, evaluation results.
* ``health`` combines them with the metrics into ``RunData``: state, time breakdown, and whether the run is healthy.
* ``sweep`` compares several runs: settings that differ, ranking, groups over seeds.
* ``style``, ``tables`` and ``charts`` make formatted text, tables, and charts as data.
* ``shell`` and its template ``base.html.j2`` are what all pages have in common.
* ``page`` and its template ``page.html.j2`` make the page; ``charts.js`` draws its charts with uPlot (``uplot/``).
* ``pictures`` draws the charts as PNG files, with matplotlib.
* ``search`` makes the section about an Optuna search.
* ``gallery`` and its template ``gallery.html.j2`` make pages of samples, for ``dtrain show`` and ``dtrain replay``.

A run directory may come from another user. Only regular files of a bounded size are read, only verified PNG data is embedded,
and everything is escaped. The page runs only its two embedded scripts, and loads nothing.
"""
