"""Object detection, for `train_yolov3.py` and its children."""
