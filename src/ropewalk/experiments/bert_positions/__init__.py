"""The comparison of position encodings in BERT, pre-trained on real text by masked-language modelling."""
