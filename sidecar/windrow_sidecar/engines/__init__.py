"""Decode engines and the one seam through which they meet Windrow."""
