//! Tries the whole way from a probe to the reader on a function of our own.
