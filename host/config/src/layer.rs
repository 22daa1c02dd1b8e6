//! Declares each setting once: as a flag, an environment variable and a key of the file.

/// Settings of several sources. One source takes precedence over another.
pub(crate) trait Layer {
    /// Uses the value of `lower` wherever this one is not set.
    #[must_use]
    fn over(self, lower: Self) -> Self;
}

impl<T> Layer for Option<T> {
    fn over(self, lower: Self) -> Self {
        self.or(lower)
    }
}

impl<T> Layer for Vec<T> {
    fn over(self, lower: Self) -> Self {
        if self.is_empty() { lower } else { self }
    }
}

/// A switch can only be turned on.
impl Layer for bool {
    fn over(self, lower: Self) -> Self {
        self || lower
    }
}

/// Declares a struct of settings. Its fields are flags and environment variables by their `arg`
/// attributes, and keys of the file by their names.
macro_rules! settings {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)*
        }
    ) => {
        #[derive(clap::Args, serde::Deserialize, Clone, Debug, Default)]
        #[serde(default)]
        $(#[$meta])*
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $name {
            /// The names of all settings.
            pub(super) const NAMES: &[&str] = &[$(stringify!($field)),*];
        }

        impl $crate::layer::Layer for $name {
            fn over(self, lower: Self) -> Self {
                Self {
                    $($field: $crate::layer::Layer::over(self.$field, lower.$field),)*
                }
            }
        }
    };
}

pub(super) use settings;
