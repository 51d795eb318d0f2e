"""The fields of a sample, and how their bytes are decoded.

Files in reading order:

* ``field``: the declaration of a field, and the errors of samples.
* ``parse``: reads fields from a config.
* ``decode``: images, arrays, numbers and text; ``media``: audio and video; ``tokenizers``; ``crop``;
  ``regions``: masks and boxes.
"""

from dtrain.data.fields.field import DataError, Field, NoSuchField, SampleError
from dtrain.data.fields.parse import parse_fields

__all__ = ["DataError", "Field", "NoSuchField", "SampleError", "parse_fields"]
