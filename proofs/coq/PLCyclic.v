(* T3: under the Polyak-Lojasiewicz inequality the cycles of T2 contract f - fmin. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum Vectors Blocks BlockDescent BiasedStep BiasedCyclic.
Open Scope R_scope.

Definition pl n (f : vec -> R) (grad : vec -> vec) (mu fmin : R) : Prop :=
  forall y, 2 * mu * (f y - fmin) <= nrm n (grad y) ^ 2.

(* a contraction of a nonnegative sequence; 1 - r >= 0 is not assumed: it follows where it matters *)
Lemma contraction (a : nat -> R) r : (forall k, 0 <= a k) -> (forall k, a (S k) <= (1 - r) * a k) ->
  forall K, a K <= (1 - r) ^ K * a 0%nat.
Proof.
  intros Ha H. destruct (Rle_lt_dec r 1) as [Hr|Hr].
  - induction K as [|K IH]; [simpl; lra|]. specialize (H K).
    apply (Rmult_le_compat_l (1 - r)) in IH; [|lra]. simpl. lra.
  - assert (Z : forall k, a k = 0).
    { intros k. pose proof (Ha k). pose proof (Ha (S k)). specialize (H k). nra. }
    intros K. rewrite !Z. lra.
Qed.

Theorem pl_cyclic : forall n q blk b f grad (Li : nat -> R) Lmax L eta delta mu fmin x gt K,
  block_smooth n blk f grad Li -> (forall i, Li i <= Lmax) -> 0 < Lmax -> 0 <= L -> lipschitz n grad L ->
  0 < eta -> 0 <= delta < 1 -> eta * Lmax * (1 + delta) < 2 -> (forall y, fmin <= f y) ->
  pl n f grad mu fmin -> biased_run n blk b grad eta delta x gt ->
  (forall k, visits_once n blk b (k * S q) (S q)) ->
  f (x (K * S q)%nat) - fmin
    <= (1 - 2 * mu * eta * sharp_coeff (eta * Lmax) delta / (1 + sqrt (INR q) * L * eta * (1 + delta)) ^ 2) ^ K
       * (f (x 0%nat) - fmin).
Proof.
  intros n q blk b f grad Li Lmax L eta delta mu fmin x gt K Hs HLi HL L0 Hl He Hd small Hf Hpl Hr Hv.
  set (c := sharp_coeff (eta * Lmax) delta). set (Q := 1 + sqrt (INR q) * L * eta * (1 + delta)).
  assert (C : 0 < eta * c).
  { apply Rmult_lt_0_compat; [lra|]. apply sharp_positive; auto. apply Rmult_lt_0_compat; lra. }
  assert (HQ : 1 <= Q).
  { pose proof (sqrt_pos (INR q)). unfold Q.
    assert (0 <= sqrt (INR q) * L * eta * (1 + delta)) by (repeat apply Rmult_le_pos; lra). lra. }
  apply (contraction (fun k => f (x (k * S q)%nat) - fmin)).
  - intros k. specialize (Hf (x (k * S q)%nat)). lra.
  - intros k.
    pose proof (biased_decreases n blk b f grad Li Lmax eta delta x gt Hs HLi He Hd Hr (k * S q) (S q)) as D.
    pose proof (biased_one_cycle n blk b grad L eta delta x gt He Hd Hr L0 Hl q (k * S q) (Hv k)) as O.
    replace (k * S q + S q)%nat with (S k * S q)%nat in D by (simpl; lia).
    cbv beta zeta in O. set (U := psum _ (S q)) in *. fold c in D. fold Q in O. specialize (Hpl (x (k * S q)%nat)).
    assert (U1 : 2 * mu * (f (x (k * S q)%nat) - fmin) / Q ^ 2 <= U).
    { apply Rmult_le_reg_l with (Q ^ 2); [apply pow_lt; lra|].
      replace (Q ^ 2 * (2 * mu * (f (x (k * S q)%nat) - fmin) / Q ^ 2))
        with (2 * mu * (f (x (k * S q)%nat) - fmin)) by (field; lra). lra. }
    apply (Rmult_le_compat_l (eta * c)) in U1; [|lra].
    replace ((1 - 2 * mu * eta * c / Q ^ 2) * (f (x (k * S q)%nat) - fmin))
      with (f (x (k * S q)%nat) - fmin - eta * c * (2 * mu * (f (x (k * S q)%nat) - fmin) / Q ^ 2)) by (field; lra).
    lra.
Qed.
