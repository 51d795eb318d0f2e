"""Reference tasks: losses and metrics. A task is any object that is called as ``task(model, batch)`` and returns an ``Output``
(``dtrain.training.task``); ``task._target_`` names it.

Files in reading order: ``losses`` (losses per row), ``classification``, ``regression`` (values, image fitting),
``language_modelling``, ``contrastive`` (pairs), ``textbook`` (generated problems with known answers).
"""

from dtrain.tasks.classification import Classification
from dtrain.tasks.contrastive import Contrastive
from dtrain.tasks.language_modelling import LanguageModelling
from dtrain.tasks.regression import ImageFitting, Regression

__all__ = ["Classification", "Contrastive", "ImageFitting", "LanguageModelling", "Regression"]
