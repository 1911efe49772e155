# SPDX-License-Identifier: Apache-2.0
"""An and Shi, 2021: noise that falls over the epochs, and easy examples first."""
