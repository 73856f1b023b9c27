"""The workflow of three_tools_2018, section 3: calibrate the noise on noise, then train on private data once."""
