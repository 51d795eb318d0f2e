"""The report of runs: what their directories tell, as one HTML file and as pictures.

* ``evidence`` gathers what a run directory holds beside its history: where its time went, ``traces`` of trouble, ``media``,
  ``evaluations``, and what ``health`` makes of it in words.
* ``charts`` chooses the pictures; each becomes SVG in the page's own colours, or PNG (``drawing``).
* ``page`` puts it together from ``sections`` and ``tables``.

A run directory may be somebody else's: names and contents are escaped, of files only regular ones are read and only PNG data
are passed on, and how much is read of what does not shrink (logs, pictures) is bounded.
"""
