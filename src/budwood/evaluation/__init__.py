"""Claims checked by retraining: linear datamodelling, removal, planted mislabels, recall of known sources."""
