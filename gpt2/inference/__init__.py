"""A trained model at work: text one token after another, losses of given texts."""
