"""Parts of models for training, in torch (extra ``torch``)."""
