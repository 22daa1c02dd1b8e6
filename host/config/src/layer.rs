//! Declares each setting once: as a flag, an environment variable and a key of the file.

/// Settings of several sources. One source takes precedence over another.
pub(crate) trait Layer {
    /// Uses the value of `lower` wherever this one is not set.
    #[must_use]
    fn over(self, lower: Self) -> Self;

    /// Whether any source sets it.
    fn is_set(&self) -> bool;
}

impl<T> Layer for Option<T> {
    fn over(self, lower: Self) -> Self {
        self.or(lower)
    }

    fn is_set(&self) -> bool {
        self.is_some()
    }
}

impl<T> Layer for Vec<T> {
    fn over(self, lower: Self) -> Self {
        if self.is_empty() { lower } else { self }
    }

    fn is_set(&self) -> bool {
        !self.is_empty()
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

            /// The name of the first setting that is set.
            pub(super) fn first_set(&self) -> Option<&'static str> {
                let all = [$(($crate::layer::Layer::is_set(&self.$field), stringify!($field))),*];
                let mut set = all.into_iter().filter(|(is_set, _)| *is_set);
                set.next().map(|(_, name)| name)
            }
        }

        impl $crate::layer::Layer for $name {
            fn over(self, lower: Self) -> Self {
                Self {
                    $($field: $crate::layer::Layer::over(self.$field, lower.$field),)*
                }
            }

            fn is_set(&self) -> bool {
                self.first_set().is_some()
            }
        }
    };
}

pub(super) use settings;
