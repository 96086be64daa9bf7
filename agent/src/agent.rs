//! The running agent: threads, attachment of new processes, and the reader that feeds the pipeline state.
