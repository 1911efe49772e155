# SPDX-License-Identifier: Apache-2.0
"""Bu et al., 2023: convergence and calibration of private training, by the clipping bound."""
