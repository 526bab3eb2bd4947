"""The data sets' files: their layout, the index of all questions, images and samples."""
