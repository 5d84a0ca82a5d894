"""What report_to names: TensorBoard, trackio and Weights & Biases, told what the run folder holds."""
