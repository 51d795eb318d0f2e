"""Small reference tasks; everything else comes in by `_target_`."""

from dtrain.tasks.classification import Classification
from dtrain.tasks.image_fitting import ImageFitting
from dtrain.tasks.language_modelling import LanguageModelling
from dtrain.tasks.regression import Regression

__all__ = ["Classification", "ImageFitting", "LanguageModelling", "Regression"]
