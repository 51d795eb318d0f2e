"""The report of runs: what their directories tell, as one HTML file and as pictures.

* ``evidence`` gathers what a run directory holds beside its history: its ``times``, its ``trouble``, ``media``,
  ``evaluations``, and what ``health`` makes of it in words.
* ``directories`` finds the runs. Several are a ``sweep``: what was ``varied`` over them, the ``goal`` that ranks them, how each
  is ``standing``, what is left of it over ``seeds``. ``sweep_table`` and ``setting_charts`` show it, numbers ``aligned``.
* ``charts`` chooses the pictures, from ``line_charts`` (long lines become an ``envelope``) and ``time_chart``; each becomes SVG
  in the page's own colours (``palette``), or PNG (``drawing``, ``pictures``).
* ``page`` puts it together from ``sections`` and ``tables``, in the ``wording`` of people.

A run directory may be somebody else's: names and contents are escaped, of files only regular ones are read and only PNG data
are passed on; how much is read of logs and pictures is bounded, and so is how much of a file is in memory at a time.
"""
