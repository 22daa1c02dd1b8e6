//! From a [`Policy`](crate::Policy) to the exports of a component.

/// Makes a type that implements [`Policy`](crate::Policy) the policy of this component, and gives the
/// component an allocator that is made for calls. Outside of WebAssembly it only looks whether the type is a
/// policy, so that the crate is tested natively.
///
/// The documentation of this crate shows a whole policy with it.
#[macro_export]
macro_rules! export {
    ($policy:ty) => {
        const _: () = {
            const fn is_policy<P: $crate::Policy>() {}
            is_policy::<$policy>();
        };

        #[cfg(target_arch = "wasm32")]
        const _: () = {
            use ::std::boxed::Box;
            use ::std::cell::Cell;
            use ::std::string::String;
            use ::std::vec::Vec;
            use $crate::bindings::exports::statehouse::policy::handler::Guest;
            use $crate::{Change, Dialect, Info, Notification, Outcome, Request, Span};

            #[global_allocator]
            static ARENA: $crate::arena::Arena = $crate::arena::Arena::new();

            ::std::thread_local! {
                static POLICY: Cell<Option<&'static $policy>> = const { Cell::new(None) };
            }

            /// The configured policy. A host that calls before it has configured breaks the contract; the
            /// trap says so in its backtrace.
            fn configured() -> &'static $policy {
                match POLICY.get() {
                    Some(policy) => policy,
                    None => ::core::arch::wasm32::unreachable(),
                }
            }

            struct Component;

            impl Guest for Component {
                fn describe() -> Info {
                    <$policy as $crate::Policy>::describe()
                }

                fn configure(options: Vec<(String, String)>) -> Result<(), String> {
                    let policy = <$policy as $crate::Policy>::configure(&options)?;
                    if POLICY.get().is_some() {
                        return Err(String::from(
                            "an instance is configured once; make a new one instead",
                        ));
                    }
                    // It lives as long as the instance does.
                    POLICY.set(Some(Box::leak(Box::new(policy))));
                    // From here on there are calls, which free what they allocate.
                    ARENA.open();
                    Ok(())
                }

                fn route(payload: Vec<u8>) -> Option<Span> {
                    $crate::Policy::route(configured(), &payload)
                }

                fn handle(request: Request) -> Outcome {
                    $crate::Policy::handle(configured(), &mut $crate::Imports, &request)
                }

                fn notify(change: Change, dialect: Dialect) -> Notification {
                    $crate::Policy::notify(configured(), &change, dialect)
                }
            }

    $crate::bindings::export_component!(Component with_types_in $crate::bindings);
        };
    };
}
