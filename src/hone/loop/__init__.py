"""The training loops: `policy` (RL), `supervised` (SFT and reward models), and the parts that they share."""
