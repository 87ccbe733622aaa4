(* T5, an uncoupled block of curvature lam, visited once in p steps with idle momentum: a cycle is exactly one EMA
   step with momentum beta^p, so the limit is 2 (1 + beta^p)/((1 - beta^p) lam). *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum MomentumStability AdamWDrift.
Open Scope R_scope.

(* gradient lam x at the first step of each cycle of p steps, zero at the others *)
Definition visited_block (x m : nat -> R) (eta beta lam : R) (p : nat) : Prop :=
  (forall k, m (S (k * p)) = beta * m (k * p)%nat + (1 - beta) * (lam * x (k * p)%nat)) /\
  (forall k i, (1 <= i < p)%nat -> m (S (k * p + i)) = beta * m (k * p + i)%nat) /\
  (forall t, x (S t) = x t - eta * m (S t)).

Definition cycle_momentum (m : nat -> R) (beta : R) (p k : nat) : R :=
  (1 - beta ^ p) / (1 - beta) * m (S (k * p)).

Theorem cycle_is_ema : forall x m eta beta lam p, (0 < p)%nat -> 0 <= beta < 1 ->
  visited_block x m eta beta lam p -> forall k,
  x (S k * p)%nat = x (k * p)%nat - eta * cycle_momentum m beta p k /\
  cycle_momentum m beta p (S k)
    = beta ^ p * cycle_momentum m beta p k + (1 - beta ^ p) * (lam * x (S k * p)%nat).
Proof.
  intros x m eta beta lam p Hp Hb [Hv [Hm Hx]] k.
  assert (M : forall i, (i < p)%nat -> m (S (k * p + i)) = beta ^ i * m (S (k * p))).
  { induction i as [|i IH]; intros Hi; [rewrite Nat.add_0_r; simpl; ring|].
    rewrite Hm by lia. rewrite Nat.add_succ_r, IH by lia. simpl. ring. }
  assert (X : forall i, (i <= p)%nat ->
    x (k * p + i)%nat = x (k * p)%nat - eta * (psum (fun j => beta ^ j) i * m (S (k * p)))).
  { induction i as [|i IH]; intros Hi; [rewrite Nat.add_0_r; simpl; ring|].
    rewrite Nat.add_succ_r, Hx, IH, M, psum_S by lia. ring. }
  assert (E : (S k * p = k * p + p)%nat) by (simpl; lia).
  split.
  - rewrite E, X by lia. rewrite geometric by lra. unfold cycle_momentum. ring.
  - unfold cycle_momentum. rewrite Hv.
    assert (L : m (S k * p)%nat = beta ^ (p - 1) * m (S (k * p)))
      by (rewrite <- M by lia; f_equal; lia).
    rewrite L. replace (beta ^ p) with (beta * beta ^ (p - 1)) at 2
      by (replace p with (S (p - 1)) at 2 by lia; reflexivity).
    field. lra.
Qed.

Lemma power_below_one beta p : 0 <= beta < 1 -> (0 < p)%nat -> 0 <= beta ^ p < 1.
Proof.
  intros Hb Hp. split; [apply pow_le; lra|]. destruct p as [|p]; [lia|]. simpl.
  assert (beta ^ p <= 1) by (rewrite <- (pow1 p); apply pow_incr; lra).
  assert (0 <= beta ^ p) by (apply pow_le; lra). nra.
Qed.

(* the limit, as an equivalence on the roots of the cycle map *)
Theorem uncoupled_limit : forall beta eta lam p, 0 <= beta < 1 -> (0 < p)%nat ->
  ((forall z, is_root (tr (beta ^ p) eta lam) (beta ^ p) z -> Cmod z < 1)
   <-> 0 < eta * lam < 2 * (1 + beta ^ p) / (1 - beta ^ p)).
Proof. intros beta eta lam p Hb Hp. apply momentum_stable_iff. apply power_below_one; assumption. Qed.
