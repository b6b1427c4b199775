"""Object detection: what only `train_yolov3.py` and its children use."""
