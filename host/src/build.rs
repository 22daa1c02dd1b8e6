//! What this program was built from, and for.

pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit, or `unknown` (see the build script).
pub(crate) const COMMIT: &str = env!("STATEHOUSE_BUILD_COMMIT");

/// The target, such as `x86_64-unknown-linux-gnu`.
pub(crate) const TARGET: &str = env!("STATEHOUSE_BUILD_TARGET");

#[cfg(feature = "cluster")]
macro_rules! features {
    () => {
        "cluster"
    };
}
#[cfg(not(feature = "cluster"))]
macro_rules! features {
    () => {
        "none"
    };
}

/// The features, or `none`.
pub(crate) const FEATURES: &str = features!();

/// The text of `--version` after the name of the program.
pub(crate) const IN_FULL: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("STATEHOUSE_BUILD_COMMIT"),
    ", ",
    env!("STATEHOUSE_BUILD_TARGET"),
    ", features: ",
    features!(),
    ")"
);
