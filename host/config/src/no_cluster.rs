//! The settings of a cluster in a build without the feature `cluster`: there are none. A host that
//! was meant to be one of a cluster must not start as a store of its own, so settings that other
//! builds know are refused.

use super::layer::Layer;
use super::{ConfigError, Flags};

/// The environment variable without which no host is in a cluster.
const CLUSTER: &str = "STATEHOUSE_CLUSTER";

/// The settings of `serve` for a cluster.
#[derive(clap::Args, serde::Deserialize, Clone, Debug, Default)]
pub struct ClusterFlags {}

/// The settings of a host in a cluster, which this build cannot be.
#[derive(Clone, Debug)]
pub enum ClusterConfig {}

/// Why the settings of a cluster are refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ClusterError {
    /// A setting that this build does not have.
    #[error("this build has no cluster: remove {0}, or build with the feature `cluster`")]
    Absent(String),
}

impl ClusterFlags {
    pub(super) const NAMES: &[&str] = &[];

    /// Why this build does not know a key of the file, if other builds do.
    pub(super) fn absent(key: &str) -> Option<String> {
        let is_known = key == "name" || key.starts_with("cluster");
        is_known.then(|| ClusterError::Absent(format!("`{key}`")).to_string())
    }
}

impl Layer for ClusterFlags {
    fn over(self, _lower: Self) -> Self {
        self
    }

    fn is_set(&self) -> bool {
        false
    }
}

impl ClusterConfig {
    /// None, unless the environment names a cluster.
    pub(super) fn load(_settings: &Flags) -> Result<Option<Self>, ConfigError> {
        match std::env::var_os(CLUSTER) {
            Some(_) => Err(ClusterError::Absent(CLUSTER.to_owned()).into()),
            None => Ok(None),
        }
    }
}
