"""Published trainings as plain scripts without dtrain; ``compare`` trains the same with dtrain, step by step."""
