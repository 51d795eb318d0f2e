"""Shows what a model will see, without training: ``dtrain show experiment=... [--split NAME]``.

In reading order:

* ``split``: the loader of a split, built as for training, and the stored values of its samples.
* ``fields``: dtype, transfer dtype, cost and range of each field.
* ``looks``: renders samples: pictures, masks, boxes, curves and texts.
* ``counts``: labels, sizes, extensions, bad samples and duplicates of whole splits.
* ``page``: the page, the lines on the terminal and the JSON file.
* ``__main__``: the command.

Every value that is shown as the model's input comes from the loader of the run. It depends on (seed, epoch, sample) only, so it
is the same in training.
"""
